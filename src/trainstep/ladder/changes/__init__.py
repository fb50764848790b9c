"""The changes that ladders try, one or a tight family a file: each `Change` that stands in a file here is tried.

A change of a script is a function of the `Trial` under way. It replaces a constructor's default, a setting of torch's,
or something about a model that is about to be called for the first time. Code that has to find its own places in the
script is in `ladder/places/`.
"""
