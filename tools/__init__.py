import common  # noqa: F401    first, because while it loads it takes the flags of tools.console
