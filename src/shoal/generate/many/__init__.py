"""A large file of prompts, worked through item by item: each answer is written once, whatever is killed meanwhile."""
