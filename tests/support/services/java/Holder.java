// Takes locks of Curator's recipes, as the lines on its input say: "mutex PATH", "read PATH", "write PATH" take one and
// print "held"; "release" gives it back and prints "free"; "try" is as "mutex", within half a second, or prints "busy".
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryOneTime;

public class Holder {
    public static void main(String[] arguments) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], new RetryOneTime(100));
        client.start();
        client.blockUntilConnected();
        System.out.println("connected");
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        InterProcessLock lock = null;
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split(" ");
            if (words[0].equals("release")) {
                lock.release();
                System.out.println("free");
                continue;
            }
            if (words[0].equals("read")) {
                lock = new InterProcessReadWriteLock(client, words[1]).readLock();
            } else if (words[0].equals("write")) {
                lock = new InterProcessReadWriteLock(client, words[1]).writeLock();
            } else {
                lock = new InterProcessMutex(client, words[1]);
            }
            if (words[0].equals("try")) {
                System.out.println(lock.acquire(500, TimeUnit.MILLISECONDS) ? "held" : "busy");
            } else {
                lock.acquire();
                System.out.println("held");
            }
        }
        client.close();
    }
}
