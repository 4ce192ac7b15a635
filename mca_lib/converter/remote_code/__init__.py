"""Code that is written beside the weights of an exported hybrid, byte by byte; transformers runs it as remote code.

It needs torch and transformers alone, in any Python that these run in. So nothing of this package may be imported here,
and none of it is imported from here but by tests.
"""
