"""How a pseudo-gradient travels: a ladder from 16 bits to a fifth of a bit a parameter. docs/decisions/036."""
