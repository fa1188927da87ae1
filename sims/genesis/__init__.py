"""Tasks in Genesis, many environments in one scene on the processor or on a GPU."""
