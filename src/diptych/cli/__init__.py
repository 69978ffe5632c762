"""The command line: one module a command, each with `run(arguments) -> exit status`. Never imports torch at the top."""
