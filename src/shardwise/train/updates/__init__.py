"""Update rules, and the table from names of parameters to what an optimizer steps."""
