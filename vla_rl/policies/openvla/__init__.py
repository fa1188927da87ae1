"""OpenVLA and OpenVLA-OFT: action tokens of a language model."""
