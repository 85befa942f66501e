"""`python -m blockyard.entrypoints.openai.api_server FLAGS`: the same as `blockyard serve FLAGS`."""

import sys

from blockyard.services.cli.entry import main

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    raise SystemExit(main())
