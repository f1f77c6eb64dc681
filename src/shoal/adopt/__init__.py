"""A doctor for somebody's training script: reads it, measures it, and mends what can be mended by rule."""
