"""`python -m trainstep`: the command."""

from trainstep.cli import main

if __name__ == "__main__":
    main()
