"""The ladder of a script, in the process that starts its runs: what is tried, judged, timed and kept.

`climb` asks for runs (`single`, on all `ranks`), has them judged by what they left (`judge`), and makes a row of each
rung (`rung_rows`); `larger` is for a batch that no run can be judged by, and `patch` writes what was kept into the
user's files.
"""
