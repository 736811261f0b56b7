"""A package, so that its fixtures of that scope end with it: the stack would be idle beside all other tests."""
