"""``jevany-admin``: add a model to a repository, or fetch what a model needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jevany_admin.add import add_model
from jevany_admin.fetch import fetch_model
from jevany_admin.model_folder import AdminError
from jevany_backend.checkpoint import CheckpointError
from jevany_backend.settings import DTYPES, SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after the command; those of this process if None.

    Returns:
        The exit code: 0, or 1 for what cannot be done.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "fetch":
            fetch_model(options.model, options.repository, lambda line: print(line, flush=True))
            return 0
        gpu = None if options.cpu else options.gpu
        dtype = options.dtype or ("float32" if options.cpu else "bfloat16")
        added = add_model(options.checkpoint, options.name, options.repository, options.base, gpu, dtype)
    except (AdminError, CheckpointError, SettingsError) as error:
        print(f"jevany-admin: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jevany-admin: stopped; what was fetched is kept", file=sys.stderr)
        return 130
    for line in added.lines():
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jevany-admin", description="Look after a repository of decision models.")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="write a model's folder from a checkpoint, after checking it")
    add.add_argument("checkpoint", help="directory, or owner/repository[@revision] on the Hub")
    add.add_argument("--name", required=True, help="name of the model")
    add.add_argument("--base", help="base, likewise; the one that the checkpoint names if left out")
    place = add.add_mutually_exclusive_group()
    place.add_argument("--gpu", type=_number, default=0, help="number of the GPU it runs on (0)")
    place.add_argument("--cpu", action="store_true", help="run it on the CPU")
    add.add_argument("--dtype", choices=list(DTYPES), help="what to serve in (bfloat16 on a GPU, float32 on the CPU)")
    fetch = commands.add_parser("fetch", help="fetch a model's adapter, base and tokenizer into the Hub cache")
    fetch.add_argument("model", help="name of the model")
    for command in (add, fetch):
        command.add_argument(
            "--repository", type=Path, default=Path("model_repository"), help="directory with the models' folders"
        )
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a GPU")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
