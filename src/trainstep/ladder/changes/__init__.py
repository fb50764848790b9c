"""What the ladder changes in a script from outside, in the script's process.

`rungs` lists the changes, `reasons` says for which scripts one is nothing. Most replace an argument or a setting there;
those that look for their places as the script runs have files of their own. Attention (`written_out`, `masks`) and a
head with its loss (`head_loss`, `logits`) are found by results that nobody has computed yet (`uncomputed`).
"""
