"""``python -m treadle.cli``."""

from treadle.cli.main import main

main()
