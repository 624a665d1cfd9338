"""`python -m gradstream` is the command `gradstream`."""

from gradstream.cli import main

if __name__ == "__main__":
    main(prog_name="gradstream")
