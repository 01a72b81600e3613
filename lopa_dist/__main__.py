"""`python -m lopa_dist`."""

from lopa_dist.cli import main

if __name__ == "__main__":
    main()
