"""From a run file to a run that can start: what is open is decided, what cannot work is refused."""
