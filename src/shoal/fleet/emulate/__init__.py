"""A wide area network on one machine: namespaces, NATs, delay, loss and cuts. docs/decisions/039."""
