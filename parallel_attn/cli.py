"""`parallel-attn SUBCOMMAND [KEY=VALUE ...]`."""

from __future__ import annotations

import sys

USAGE = """\
usage: parallel-attn SUBCOMMAND [KEY=VALUE ...]

  train     pretrain a language model: the same as train.py, from an installed package
            parallel-attn train attention=mqa train.steps=50
            torchrun --standalone --nproc-per-node 2 -m parallel_attn.cli train parallel.tensor=2

`parallel-attn train --help` lists groups and keys."""


def main() -> None:
    """Console entry. Exits with 2 for an unknown subcommand."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    if arguments[0] != "train":
        print(f"error: parallel-attn {arguments[0]}: unknown subcommand, use one of: train", file=sys.stderr)
        sys.exit(2)
    from parallel_attn.training.entry import main as train

    sys.argv = ["parallel-attn train", *arguments[1:]]
    train()


if __name__ == "__main__":
    main()
