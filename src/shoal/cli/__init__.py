"""The command line: `main` finds the verb, one small file a verb does the work."""
