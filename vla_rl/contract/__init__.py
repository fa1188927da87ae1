"""What simulators, world models, robots and learners share: data and its validation, no behaviour.

Standard library and numpy only (``wire`` adds msgpack), so a robot computer or a simulator process can import it
without torch.  Shape letters used in the whole repository:

``E`` environments, ``T`` time in decisions, ``H`` actions in a chunk, ``D`` action dimension, ``S`` state dimension,
``K`` denoising steps, ``B`` flattened batch, ``h w c`` image height, width, channels (channels last).
"""

CONTRACT_VERSION = 2
