"""LeRobotDatasets (https://github.com/huggingface/lerobot) without lerobot: v3.0; v2.1 and v2.0 are read only.

features.py   columns, their types on disk, ``info.json``; statistics per episode and of all, with quantiles
metadata.py   ``meta/``: which episodes a dataset has and where each of them lies, in every version
layout.py     ``recording/``: episodes that are not yet in v3.0 files
reader.py     any folder, finished or not, one episode at a time
writer.py     one episode at a time, crash-safe; v3.0 files; ``repair`` after a process was killed
parquet.py    files of others, checked before they are read
video.py      frames to MP4 or PNG and back, MP4s joined without encoding again
disk.py       atomic writes; locks; what is damaged

Everything but ``disk.py`` needs pyarrow and PyAV (``pip install 'vla-rl[data]'``).
"""
