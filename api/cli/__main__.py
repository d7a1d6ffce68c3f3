"""`python -m tinsmith.api.cli` is the command `tinsmith`."""

import sys

from tinsmith.api.cli.main import main

sys.exit(main())
