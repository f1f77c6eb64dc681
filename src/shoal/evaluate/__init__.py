"""How good a model is: tasks, what is asked of a model for them, what its answers are worth, and how sure that is."""
