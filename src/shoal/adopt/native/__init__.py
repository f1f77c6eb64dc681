"""From somebody's script to a run file of Shoal's own, where Shoal can train the same natively."""
