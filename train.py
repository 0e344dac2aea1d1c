"""Pretrains a small language model with tensor-parallel attention. `python train.py --help` lists groups and keys."""

from parallel_attn.training.entry import main

if __name__ == "__main__":
    main()
