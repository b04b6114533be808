"""One module per engine, with a class `Engine`; `worker` runs one of them in a process of its own."""
