"""The command's `main`, where it used to be: `vecenv.command.cli` has it."""

from vecenv.command.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
