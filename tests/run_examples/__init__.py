"""The examples, run as a user runs them, at tiny size; and what makes their comparisons fair."""
