"""`python -m gradstream` is the command `gradstream`."""

from gradstream.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="gradstream")
