"""`python -m trainstep`: the command."""

import os
import sys


def main() -> None:
    """Call `trainstep.commands.cli.main`, imported here so that Ctrl-C during imports is no traceback."""
    try:
        from trainstep.commands.cli import main as run
    except KeyboardInterrupt:
        os.write(2, b"trainstep: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
