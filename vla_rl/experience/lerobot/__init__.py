"""Reading and writing LeRobotDataset v3.0 (https://github.com/huggingface/lerobot) without lerobot itself.

features.py    columns, their types, ``info.json``
writer.py      one episode at a time, crash-safe; ``repair`` after a process was killed
live.py        the folder of one episode that is recorded but not yet in v3.0 files
compact.py     turns recorded episodes into v3.0 files and writes ``meta/``; ``info.json`` last
metadata.py    reads ``meta/``: counts, tasks, the place of each episode
video.py       frames to MP4 or PNG and back, MP4s joined without encoding again
statistics.py  per episode and of all, with quantiles
translate.py   reads any v3.0 folder, finished or not, as ``Demonstrations``, names damage and reads the rest; and back
disk.py        atomic writes; what is damaged

Everything here needs pyarrow and PyAV (``pip install 'vla-rl[data]'``).
"""
