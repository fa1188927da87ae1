"""Reading and writing LeRobotDataset v3.0 (https://github.com/huggingface/lerobot) without lerobot itself.

features.py   columns, their types on disk, ``info.json``; statistics per episode and of all, with quantiles
layout.py     what lies in a dataset's folder: ``meta/`` and recorded episodes
reader.py     any v3.0 folder, finished or not, one episode at a time
writer.py     one episode at a time, crash-safe; v3.0 files; ``repair`` after a process was killed
parquet.py    files of others, checked before they are read
video.py      frames to MP4 or PNG and back, MP4s joined without encoding again
disk.py       atomic writes; locks; what is damaged

Everything but ``disk.py`` needs pyarrow and PyAV (``pip install 'vla-rl[data]'``).
"""
