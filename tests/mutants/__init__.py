"""Which tests fail for a package that is wrong on purpose."""
