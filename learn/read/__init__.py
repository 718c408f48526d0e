"""The reading pages: the equations, the code and real numbers of each script, side by side."""
