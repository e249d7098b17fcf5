"""Files and folders, here and elsewhere: what all rooms need to write safely and to read only what may be read.

atomic_write   files that are complete or absent, and disk space that is reserved for them
plain_files    opening of files in folders of other users: no links, no FIFOs, no devices
lock           one process at a time in a folder
object_store   a folder that several machines reach, as a path or a URL
expanded       paths as users write them, with ~, whether files can be created there, and the cache folder
sha256         digests
secrets        secrets in URLs: refused in configurations, hidden in messages
"""
