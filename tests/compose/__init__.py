"""What `make compose` runs. The files have no `test_` in their names, so that `make check` leaves them out: they start
containers, and a suite that needs no engine must not."""
