"""The top-level modules that are Python's own: of a file, nothing in them is somebody's class.

Source: `sys.stdlib_module_names` of Python 3.10, 3.11, 3.12 and 3.13, and the same list of 3.14, together; of Python 2.7 what
`pickle` itself translates to a module of today, and its built-in modules; and the installers that come with Python.
"""

PYTHON3 = """
    __future__ _abc _aix_support _android_support _apple_support _ast _ast_unparse _asyncio _bisect _blake2
    _bootsubprocess _bz2 _codecs _codecs_cn _codecs_hk _codecs_iso2022 _codecs_jp _codecs_kr _codecs_tw _collections
    _collections_abc _colorize _compat_pickle _compression _contextvars _crypt _csv _ctypes _curses _curses_panel
    _datetime _dbm _decimal _elementtree _frozen_importlib _frozen_importlib_external _functools _gdbm _hashlib
    _heapq _hmac _imp _interpchannels _interpqueues _interpreters _io _ios_support _json _locale _lsprof _lzma
    _markupbase _md5 _msi _multibytecodec _multiprocessing _opcode _opcode_metadata _operator _osx_support
    _overlapped _pickle _posixshmem _posixsubprocess _py_abc _py_warnings _pydatetime _pydecimal _pyio _pylong
    _pyrepl _queue _random _remote_debugging _scproxy _sha1 _sha2 _sha256 _sha3 _sha512 _signal _sitebuiltins
    _socket _sqlite3 _sre _ssl _stat _statistics _string _strptime _struct _suggestions _symtable _sysconfig _thread
    _threading_local _tkinter _tokenize _tracemalloc _types _typing _uuid _warnings _weakref _weakrefset _winapi
    _wmi _zoneinfo _zstd abc aifc annotationlib antigravity argparse array ast asynchat asyncio asyncore atexit
    audioop base64 bdb binascii binhex bisect builtins bz2 cProfile calendar cgi cgitb chunk cmath cmd code codecs
    codeop collections colorsys compileall compression concurrent configparser contextlib contextvars copy copyreg
    crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest email encodings ensurepip
    enum errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc genericpath getopt getpass
    gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib imaplib imghdr imp importlib inspect io
    ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes
    mmap modulefinder msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode operator
    optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform plistlib poplib posix posixpath
    pprint profile pstats pty pwd py_compile pyclbr pydoc pydoc_data pyexpat queue quopri random re readline reprlib
    resource rlcompleter runpy sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr
    socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics string stringprep
    struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios test textwrap
    this threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle turtledemo
    types typing unicodedata unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref
    xdrlib xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
"""

PYTHON2 = """
    BaseHTTPServer Bastion CDROM CGIHTTPServer Canvas ConfigParser Cookie DLFCN Dialog DocXMLRPCServer FileDialog
    FixTk HTMLParser IN MimeWriter Queue ScrolledText SimpleDialog SimpleHTTPServer SimpleXMLRPCServer SocketServer
    StringIO TYPES Tix Tkconstants Tkdnd Tkinter UserDict UserList UserString _LWPCookieJar _MozillaCookieJar
    __builtin__ _abcoll _ctypes_test _hotshot _sha _sysconfigdata _winreg anydbm audiodev bsddb cPickle
    cStringIO commands compiler cookielib copy_reg dbhash dircache dumbdbm dummy_thread dummy_threading exceptions
    formatter fpformat future_builtins gdbm hotshot htmlentitydefs htmllib httplib ihooks imputil linuxaudiodev
    macpath macurl2path markupbase md5 mhlib mimetools mimify multifile mutex new os2emxpath parser popen2 posixfile
    repr rexec rfc822 robotparser sets sgmllib sha sre statvfs stringold strop sunaudio symbol thread tkColorChooser
    tkCommonDialog tkFileDialog tkFont tkMessageBox tkSimpleDialog toaiff ttk urllib2 urlparse user whichdb xmllib
    xmlrpclib xxsubtype
"""

INSTALLERS = "pip setuptools pkg_resources wheel ensurepip _distutils_hack distutils_hack"

PYTHON_MODULES = frozenset(f"{PYTHON3} {PYTHON2} {INSTALLERS}".split())
