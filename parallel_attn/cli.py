"""`parallel-attn SUBCOMMAND [KEY=VALUE ...]`."""

from __future__ import annotations

import sys

USAGE = """\
usage: parallel-attn SUBCOMMAND [KEY=VALUE ...]

  train     pretrain a language model: the same as train.py, from an installed package
            parallel-attn train attention=mqa train.steps=50
            torchrun --standalone --nproc-per-node 2 -m parallel_attn.cli train parallel.tensor=2

  verify    prove on this machine that a configuration trains the same when it is sharded; starts its own processes
            parallel-attn verify attention=mqa parallel.tensor=4

  checkpoint  list the checkpoints of a run, verify their checksums, show what is inside
              parallel-attn checkpoint run=runs/a

  generate  continue a prompt with the model of a run
            parallel-attn generate run=runs/a prompt="def main(" max_new_tokens=200

  export    write a run as a folder that transformers loads
            parallel-attn export run=runs/a out=hf_model

  convert   read such a folder, or give a run other KV heads: into a run folder that train.py goes on with
            parallel-attn convert hf_model=DIR out=runs/imported
            parallel-attn convert run=runs/a attention=gqa attention.num_kv_heads=2 out=runs/gqa

`parallel-attn SUBCOMMAND --help` says more; that of train lists groups and keys."""


def main() -> None:
    """Console entry. Exits with 2 for an unknown subcommand."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    run = SUBCOMMANDS.get(arguments[0])
    if run is None:
        known = ", ".join(SUBCOMMANDS)
        print(f"error: parallel-attn {arguments[0]}: unknown subcommand, use one of: {known}", file=sys.stderr)
        sys.exit(2)
    run(arguments[1:])


def train(arguments: list[str]) -> None:
    from parallel_attn.training.entry import main as run

    sys.argv = ["parallel-attn train", *arguments]
    run()


def verify(arguments: list[str]) -> None:
    from parallel_attn.planning.verify import main as run

    sys.exit(run(arguments))


def checkpoint(arguments: list[str]) -> None:
    from parallel_attn.checkpoint.show import main as run

    sys.exit(run(arguments))


def generate(arguments: list[str]) -> None:
    from parallel_attn.runs.generate import main as run

    run(arguments)


def export(arguments: list[str]) -> None:
    from parallel_attn.runs.export import main as run

    sys.exit(run(arguments))


def convert(arguments: list[str]) -> None:
    from parallel_attn.runs.convert import main as run

    sys.exit(run(arguments))


SUBCOMMANDS = {
    "train": train,
    "verify": verify,
    "checkpoint": checkpoint,
    "generate": generate,
    "export": export,
    "convert": convert,
}

if __name__ == "__main__":
    main()
