"""LeRobotDataset v3.0 (https://github.com/huggingface/lerobot) in and out, without needing lerobot itself.

features.py    what a dataset holds: columns, their types, ``info.json``
writer.py      one episode at a time, crash-safe; ``repair`` for what a killed process left
live.py        the folder of one episode that is recorded but not yet in v3.0 files
compact.py     recorded episodes become v3.0 files; ``info.json`` last
reader.py      any v3.0 folder, finished or not; names what is damaged and reads the rest
metadata.py    ``meta/`` read: counts, tasks, where each episode lies; tables.py writes it
video.py       frames to MP4 or PNG and back, MP4s joined without encoding again
statistics.py  per episode and of all, with quantiles
translate.py   ``Demonstrations`` to such a folder and back
disk.py        writes that a crash or a power cut leaves whole or undone

Everything here needs pyarrow and PyAV (``pip install 'vla-rl[data]'``).
"""
