"""The weighted sum of a few rows of a large table, whose backward pass knows the rows that were read and no others."""
