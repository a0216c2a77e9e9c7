"""The inference engine, without HTTP.

build.py makes an Engine, and loop.py runs it. core schedules, runtime computes, text handles text.
"""
