"""`python -m blockyard`: the command line."""

from blockyard.services.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
