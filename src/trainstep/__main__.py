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
    if sys.argv[1:2] == ["run"] and not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # -m put it there, and files of the script's may be named as modules that are imported here
    main()
