"""Measures of a model: tasks, their statistics, and what makes two of them comparable."""
