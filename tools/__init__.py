"""For the reader and the maintainer: no script needs anything in here to run."""
