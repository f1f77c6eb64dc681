"""Worker groups over several nodes: node 0's agent supervises, the others do as it says (docs/decisions/030)."""
