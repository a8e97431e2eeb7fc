"""`python -m kvstore`: the same as the command `kvstore`."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
