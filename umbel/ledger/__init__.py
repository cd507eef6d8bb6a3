"""Who contributed what, in a form that others can check: keys, signed manifests, hash chains, verification.

`chain` links the lines of a file; `keys` are a site's ed25519 keys; `manifest` is what a site signs about one update;
`book` is the server's chain of committed rounds; `verify` reads both and names the first broken link.
"""
