"""The commands of `checkmate-tf`, one module each: `add_parser(subparsers)` declares it, `run(args)` runs it."""
