"""A model that no peer holds alone: its layers on several peers, with compressed activations. docs/decisions/040."""
