"""The trainer of a peer, which its node starts: rounds of inner steps, and the outer step."""
